"""Files at URLs, in place of local ones."""
