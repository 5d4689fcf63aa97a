"""What attaches to other people's pipelines and comes off again."""
