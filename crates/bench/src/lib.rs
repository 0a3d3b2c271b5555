//! Load generators and their statistics.
