"""Plans and graphs for people to look at: reports, text, pictures, pages."""
