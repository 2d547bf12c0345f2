"""Read the rollout files of training frameworks as completions, and write results per token; neither needs an engine."""
