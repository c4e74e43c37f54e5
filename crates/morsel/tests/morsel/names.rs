//! Morsels by name, which only the module has.

use vellum_morsel::{Access, BackendKind, Error, Shape};

use crate::common::{on_each, on_memfd};

#[test]
fn a_name_finds_the_morsel_until_it_is_unlinked() {
    on_each(|provider| {
        if provider.backend() != BackendKind::Kernel {
            return;
        }
        let name = format!("test-{}", std::process::id());
        let morsel = provider.create_named(&name, &Shape::of_length(5_000)).unwrap();
        morsel.map(Access::ReadWrite).unwrap().write_at(0, b"named").unwrap();
        let taken = provider.create_named(&name, &Shape::of_length(1)).unwrap_err();
        assert_eq!(taken, Error::NameTaken { name: name.clone() });
        let found = provider.open(&name, Access::Read).unwrap();
        let mut bytes = [0; 5];
        found.map(Access::Read).unwrap().read_at(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"named");
        assert!(provider.list().unwrap().contains(&name));
        provider.unlink(&name).unwrap();
        assert!(!provider.list().unwrap().contains(&name));
        for missing in [provider.open(&name, Access::Read).map(drop), provider.unlink(&name)] {
            assert_eq!(missing, Err(Error::NoSuchName { name: name.clone() }));
        }
        assert_eq!(found.stat().unwrap().pages, 1);
    });
}

#[test]
fn invalid_names_are_refused() {
    on_each(|provider| {
        let bad = provider.create_named("a/b", &Shape::of_length(1)).unwrap_err();
        assert!(matches!(bad, Error::BadName { .. }), "{bad:?}");
        let bad = provider.open("..", Access::Read).unwrap_err();
        assert!(matches!(bad, Error::BadName { .. }), "{bad:?}");
    });
}

#[test]
fn without_names_the_error_says_what_to_do() {
    on_memfd(|provider| {
        let errors = [
            provider.create_named("model", &Shape::of_length(1)).unwrap_err(),
            provider.open("model", Access::Read).unwrap_err(),
            provider.list().unwrap_err(),
            provider.unlink("model").unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
            assert!(error.to_string().contains("cache daemon"), "{error}");
        }
    });
}
