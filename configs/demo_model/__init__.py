"""Training scripts of the packaged demonstration model and its adapter: `python -m configs.demo_model.train`."""
