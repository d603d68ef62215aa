"""`mimkit bench WHAT`: one file each, see `mimkit.cli._folder`."""
