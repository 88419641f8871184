"""What the Jupyter server does for the lab extension: judging and promoting what it is sent."""
