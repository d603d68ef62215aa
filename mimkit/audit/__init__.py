"""What can be measured about a part before hours are spent on it."""
