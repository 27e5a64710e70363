"""Plans against plans: `diff`, `lock` and `check`."""
