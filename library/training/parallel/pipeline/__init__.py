"""Pipeline parallelism: stages, the messages between them, schedules."""
