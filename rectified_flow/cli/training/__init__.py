"""What a training program does before it trains: flags that it chooses, data that it generates, and checks."""
