"""Prompts of the report: one of each domain, and pairs on which routing changes in the middle."""

from __future__ import annotations

PROMPTS = {  # none ends with a space or a newline: those belong to the next token
    "english": "And the king said unto them,",
    "french": "Elle ouvrit la fenêtre et",
    "spanish": "El navío se acercaba, y los marineros",
    "python": "class Reader:\n    def __init__(self, path):",
    "c": "static int read_block(unsigned char *data, int length)\n{",
    "arithmetic": "3 + 4 = 7\n12 + 30 = 42\n25 + 17 =",
    "json": '{\n  "order": 1204,\n  "date": "2001-05-17",',
    "markup": '<!DOCTYPE html>\n<html lang="en">\n<head>',
}
SHOWCASE = [  # parts of one prompt, each with its domain; joined by a blank line
    [
        ("english", "And the king said unto the people, Go ye up into the city, and gather the men of war."),
        (
            "python",
            "def gather(self, names):\n    for name in names:\n        self.items.append(name)\n    return self.items",
        ),
    ],
    [
        ("english", "Alice was not a bit hurt, and she jumped up on to her feet in a moment."),
        ("french", "Emma était assise près de la fenêtre; elle regardait les gens du village passer dans la rue."),
    ],
    [
        ("json", '{"id": 512, "name": "Ada Stone", "age": 36, "city": "Lima", "active": true}'),
        ("arithmetic", "12 + 30 = 42\n25 + 17 = 42\n64 - 8 = 56\n7 * 9 = 63"),
    ],
    [
        (
            "python",
            "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
            "    def push(self, value):\n        self.items.append(value)",
        ),
        (
            "markup",
            "<table>\n    <tr><th>Name</th><th>City</th></tr>\n    <tr><td>Ada</td><td>Lima</td></tr>\n  </table>",
        ),
    ],
    [
        (
            "markup",
            '<ul class="green">\n    <li><a href="/lamp/4.html">lamp</a></li>\n'
            '    <li><a href="/chair/7.html">chair</a></li>\n  </ul>',
        ),
        ("english", "Then the angel of the LORD came again, and stood by the river, and spake unto him."),
    ],
    [
        ("spanish", "Mi amo subió al navío con los marineros, y yo le seguí lleno de miedo."),
        ("arithmetic", "3, 6, 9, 12, 15, 18, 21\nsort 9 4 7 1 = 1 4 7 9\n1998-03-05 + 10 days = 1998-03-15"),
    ],
    [
        ("french", "Le docteur prit son chapeau et sortit sans rien dire, car il était fort triste."),
        ("json", '{\n  "sensor": "oslo-4",\n  "unit": "C",\n  "values": [18.2, 19.5, 21.0],\n  "error": null\n}'),
    ],
    [
        ("c", "for (i = 0; i < n; ++i) {\n   out[i] = (unsigned char) (data[i] & 255);\n}"),
        ("spanish", "La escuadra inglesa estaba a la vista, y el viento era muy escaso aquella mañana."),
    ],
]
