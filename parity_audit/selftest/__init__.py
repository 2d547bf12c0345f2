"""Does the auditor find what was planted, and leave clean ports alone? The corpus, its run and its score."""
