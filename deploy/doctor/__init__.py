"""`hotbranch doctor`: what is wrong between clients, router and engines, and how to mend it."""
