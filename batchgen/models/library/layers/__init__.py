"""Changes to the layers of library models: how they attend, and how experts are computed."""
