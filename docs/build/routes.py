def routes_page() -> str: return '# routes\n'
