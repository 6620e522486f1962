"""Views for Jupyter. Each module is loaded when its class is first used, so that `import colibri_lab` stays light."""
