"""What came of a job: verdict, plan, budget and recording."""
