"""Tests that the largest inputs of each endpoint cost little more than ordinary ones."""
