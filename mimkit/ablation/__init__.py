"""The stem study: arms and seeds, paired; run, compared with uncertainty, and reported."""
