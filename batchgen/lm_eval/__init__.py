"""batchgen as a model of lm-eval, EleutherAI's evaluation harness: see `model.py`."""
