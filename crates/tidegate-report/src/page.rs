//! A page that needs no network.

const STYLE: &str = "\
:root{color-scheme:light dark;--ground:#fff;--text:#1f2328;--muted:#59636e;--line:#e4e7eb}\
@media (prefers-color-scheme:dark){:root{--ground:#14171c;--text:#e6e9ee;--muted:#a3adb8;--line:#2b3139}}\
body{margin:0 auto;padding:24px 16px;max-width:1200px;background:var(--ground);color:var(--text);\
font:15px/1.5 system-ui,sans-serif}\
h1{font-size:24px;margin:0}h2{font-size:16px;margin:0 0 6px}p{color:var(--muted);margin:4px 0 16px}\
div{overflow-x:auto}table{border-collapse:collapse;width:100%;margin-bottom:24px;font-variant-numeric:tabular-nums}\
th,td{padding:4px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}\
th{color:var(--muted);font-weight:500}th:first-child,td:first-child{text-align:left}\
svg{display:block;width:100%;height:auto}";

/// Returns a page of this title and body, both of which are escaped already.
pub fn html_page(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>\
         {body}</body></html>\n"
    )
}

/// Escapes text for XML and HTML.
pub fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
