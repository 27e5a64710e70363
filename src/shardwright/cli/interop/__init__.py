"""`import` and `export`.

import_.py         `import`
export.py          `export`
import_options.py  their options, as data
"""
