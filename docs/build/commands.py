def commands_page() -> str: return '# commands\n'
