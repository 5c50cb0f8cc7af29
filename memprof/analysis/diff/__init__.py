"""What two recordings differ in, what a recording comes to as a baseline, and the bounds that guard it."""
