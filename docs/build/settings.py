def settings_page() -> str: return '# settings\n'
