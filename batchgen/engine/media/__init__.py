"""Images and sounds of a job: read with its rows, decoded ahead of the device, encoded once, laid out in steps."""
