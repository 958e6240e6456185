"""The cases, in files by stage; importing a file registers its cases (`tests.gpu.registry.cases`)."""
