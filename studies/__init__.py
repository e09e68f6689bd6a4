"""Questions that trainings answer: cases with several seeds and budgets, see README.md."""
