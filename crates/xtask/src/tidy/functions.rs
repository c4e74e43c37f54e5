//! The length of functions.

use super::finding::Finding;
use super::rust_text::{find_words, line_of};
use super::tree::Tree;

/// Lines of a function, from `fn` to its closing brace.
const LINES: usize = 80;

/// No function has more than 80 lines.
pub fn function_length(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files() {
        let code = file.rust().code;
        for start in find_words(&code, "fn") {
            let Some(length) = body_end(&code.as_bytes()[start..]) else {
                continue;
            };
            let (first, last) = (line_of(&code, start), line_of(&code, start + length));
            let lines = last - first + 1;
            if lines > LINES {
                let name = name_after(&code[start..]);
                let message = format!("function {name} has {lines} lines; at most {LINES}");
                findings.push(Finding::new(&file.path, first, message));
            }
        }
    }
    findings
}

/// Where the body of the function at the start of `code` ends; `None` without a body (a function
/// pointer's type, a declaration in a trait).
fn body_end(code: &[u8]) -> Option<usize> {
    // The braces of a constant in an array's length are inside brackets, so they do not begin the
    // body.
    let mut brackets = 0_i32;
    let mut braces = 0_i32;
    for (at, byte) in code.iter().enumerate() {
        match byte {
            b'(' | b'[' => brackets += 1,
            b')' | b']' if braces == 0 && brackets == 0 => return None,
            b')' | b']' => brackets -= 1,
            b';' | b',' | b'=' if braces == 0 && brackets == 0 && !is_signature(code, at) => {
                return None;
            }
            b'{' if braces > 0 || brackets == 0 => braces += 1,
            b'}' if braces == 0 && brackets == 0 => return None,
            b'}' if braces > 0 => {
                braces -= 1;
                if braces == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

/// Whether a comma or equals sign at `at` can be a part of a signature: inside `<...>` of generics
/// or in a `where` clause, as in `fn f<A, B>(a: A) where A: Iterator<Item = B>, B: Copy {`.
fn is_signature(code: &[u8], at: usize) -> bool {
    let before = String::from_utf8_lossy(&code[..at]).replace("->", "");
    let open = before.matches('<').count() > before.matches('>').count();
    code[at] != b';' && (open || find_words(&before, "where").next().is_some())
}

fn name_after(code: &str) -> &str {
    let rest = code["fn".len()..].trim_start();
    let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
    &rest[..end.unwrap_or(rest.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let tree = Tree::of(&[("crates/x/src/lib.rs", text)]);
        function_length(&tree).into_iter().map(|finding| finding.message).collect()
    }

    fn function(signature: &str, lines: usize) -> String {
        format!("{signature} {{\n{}}}\n", "    step();\n".repeat(lines - 2))
    }

    #[test]
    fn long_functions_are_found() {
        assert!(found(&function("fn short()", 80)).is_empty());
        assert_eq!(found(&function("fn long()", 81)), ["function long has 81 lines; at most 80"]);
        let generic = "pub fn g<A, B>(a: [A; { 1 + 2 }]) -> B where A: Into<B>, B: Copy";
        assert_eq!(found(&function(generic, 90)).len(), 1);
    }

    #[test]
    fn braces_in_strings_and_declarations_do_not_confuse() {
        let text = format!("{}{}", "fn a() { f('{', \"{{{\"); }\n", function("fn b()", 70));
        assert!(found(&text).is_empty());
        let body = "x\n".repeat(100);
        assert!(found(&format!("trait T {{ fn a(&self);\n{body} }}")).is_empty());
        assert!(found(&format!("type F = fn(u8) -> u8;\nmod m {{ {body} }}")).is_empty());
        assert!(found(&format!("struct S {{ f: fn(u8), }}\nmod m {{ {body} }}")).is_empty());
        assert!(found(&format!("const F: fn() = a;\nmod m {{ {body} }}")).is_empty());
    }
}
