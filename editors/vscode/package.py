#!/usr/bin/env python3
"""Packages the extension as a .vsix file, without network and without Node:  python editors/vscode/package.py [FILE]

Install it:  code --install-extension FILE
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("package.json", "extension.js", "README.md", "LICENSE")
TYPES = """<?xml version="1.0" encoding="utf-8"?>
<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">
<Default Extension=".json" ContentType="application/json"/><Default Extension=".js" ContentType="application/javascript"/>
<Default Extension=".md" ContentType="text/markdown"/><Default Extension=".vsixmanifest" ContentType="text/xml"/>
<Override PartName="/extension/LICENSE" ContentType="text/plain"/></Types>
"""
MANIFEST = """<?xml version="1.0" encoding="utf-8"?>
<PackageManifest Version="2.0.0" xmlns="http://schemas.microsoft.com/developer/vsx-schema/2011">
<Metadata><Identity Language="en-US" Id="{name}" Version="{version}" Publisher="{publisher}"/>
<DisplayName>{displayName}</DisplayName><Description xml:space="preserve">{description}</Description>
<Categories>{categories}</Categories>
<Properties><Property Id="Microsoft.VisualStudio.Code.Engine" Value="{engine}"/></Properties></Metadata>
<Installation><InstallationTarget Id="Microsoft.VisualStudio.Code"/></Installation><Dependencies/>
<Assets><Asset Type="Microsoft.VisualStudio.Code.Manifest" Path="extension/package.json" Addressable="true"/>
<Asset Type="Microsoft.VisualStudio.Services.Content.Details" Path="extension/README.md" Addressable="true"/></Assets>
</PackageManifest>
"""


def main() -> int:
    about = json.loads((HERE / "package.json").read_text(encoding="utf-8"))
    out = Path(sys.argv[1] if len(sys.argv) > 1 else f"{about['name']}-{about['version']}.vsix")
    known = {k: v for k, v in about.items() if isinstance(v, str)}
    manifest = MANIFEST.format(**known, categories=",".join(about["categories"]), engine=about["engines"]["vscode"])
    license_file = HERE.parent.parent / "LICENSE"
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("extension.vsixmanifest", manifest)
        z.writestr("[Content_Types].xml", TYPES)
        for name in FILES:
            source = license_file if name == "LICENSE" else HERE / name
            z.writestr(f"extension/{name}", source.read_bytes())
    print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
