"""Networks: tensors in, tensors out; the conditions that they take; and how they are put on a device."""
