"""Two traces compared: where they part, by how much, and why."""
