"""What each command takes (`parser`, `options`) and does; its module is imported when it runs."""
