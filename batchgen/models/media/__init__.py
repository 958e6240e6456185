"""Encoders of images and sounds."""
