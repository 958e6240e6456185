"""Changes to the layers of library models: how they attend, and how projections and experts are computed."""
