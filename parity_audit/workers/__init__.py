"""Workers, each of which runs one backend, as their parent process sees them: start one, send requests, time out, kill it."""
