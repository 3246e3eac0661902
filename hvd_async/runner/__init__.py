"""What the training runners of all frameworks share: options, data, delays, schedule, reports. No framework here."""
