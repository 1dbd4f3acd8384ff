"""The recovery protocol: pure decisions. Imports the standard library's pure parts alone."""
