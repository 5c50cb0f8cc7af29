"""The outcome of a job: verdict, plan, budget and recording."""
