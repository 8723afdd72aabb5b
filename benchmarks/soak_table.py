"""x"""


def render(r):
    return []
