"""Definition of a small workload for tests of `batchgen bench`."""

TOY = """\
name = "toy"
description = "two prompts after one prefix"
output = [2, 3]

[[levels]]
children = 1
tokens = [8, 8]

[[levels]]
children = 2
tokens = [2, 4]
"""
