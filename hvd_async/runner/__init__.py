"""The framework-free half of the training runners: options, data, delays, schedule, reports. No framework here."""
