"""The verification report as an HTML page with figures."""
