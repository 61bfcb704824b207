"""Speed of folders, and of passes that time themselves."""
