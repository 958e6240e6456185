"""Planning of a job: prefix tree, KV pages and step plans, with numpy and without torch."""
