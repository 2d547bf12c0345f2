"""The test of the auditor: does it find planted faults and report nothing on clean ports? The corpus, its run and its score."""
