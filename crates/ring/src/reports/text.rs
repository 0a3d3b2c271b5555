//! Texts of guests, clients and images in messages for people.

/// Returns whether a character could change or hide what a terminal or a log shows: control
/// characters, those that change the direction of text, and those without width.
pub fn is_deceptive(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}')
}

/// Returns a text with a question mark for each such character.
pub fn clean(text: &str) -> String {
    text.replace(is_deceptive, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_change_the_direction_or_have_no_width_are_shown_as_question_marks() {
        assert_eq!(clean("web\u{202e}wocq.gmi\u{2066}\u{200b}\n\u{1b}[2J"), "web?wocq.gmi????[2J");
        for plain in ["a b", "\u{5d0}\u{5d1}", "\u{e4}\u{1f4be}", "\u{3042}"] {
            assert_eq!(clean(plain), plain);
        }
    }
}
