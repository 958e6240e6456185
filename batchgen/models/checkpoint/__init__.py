"""What a checkpoint is: its folder, configuration, stored forms and weights."""
