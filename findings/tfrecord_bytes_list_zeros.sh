#!/usr/bin/env bash
# tfrecord 1.14.6: of a feature with several byte strings the reader returns them as a NumPy array
# of fixed width, which drops the zero bytes at the end of each. Token ids that were written as the
# bytes of int32 arrays, one string for each document, come back short: the last id has 1 to 3 bytes
# and can't be decoded, ids of 0 at the end are gone altogether. The file has all bytes, and a
# feature with one byte string comes back whole. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5 tfrecord==1.14.6 protobuf==7.36.2
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys
import tempfile

import numpy as np
from tfrecord import TFRecordWriter, example_pb2, tfrecord_loader
from tfrecord.reader import tfrecord_iterator

documents = [[17, 5, 300], [70_000, 2, 0], [16_777_216, 0, 0]]
encoded = [np.array(document, dtype=np.int32).tobytes() for document in documents]
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "documents.tfrecord")
    writer = TFRecordWriter(path)
    writer.write({"documents": (encoded, "byte")})
    for document in encoded:
        writer.write({"documents": (document, "byte")})
    writer.close()
    example = example_pb2.Example()
    example.ParseFromString(bytes(next(tfrecord_iterator(path))))
    in_file = list(example.features.feature["documents"].bytes_list.value)
    together, *alone = [
        record["documents"] for record in tfrecord_loader(path, None, {"documents": "byte"})
    ]

is_as_described = in_file == encoded and alone == encoded
print(f"three in one feature come back as {type(together).__name__} of {together.dtype}")
for document, written, read, read_alone in zip(documents, encoded, together, alone, strict=True):
    whole = read[: len(read) // 4 * 4]
    print(f"{document}, {len(written)} bytes: alone in a feature {len(read_alone)} come back,")
    print(f"    with others {len(read)}, of which {np.frombuffer(whole, np.int32)} can be decoded")
    is_as_described &= read == written.rstrip(b"\0") and len(read) < len(written)
sys.exit(0 if is_as_described else "byte strings come back whole")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
