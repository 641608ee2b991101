//! Conditions and variables of limitador's limits: expressions of [CEL](https://cel.dev).

#[cfg(feature = "limitador")]
pub use with_cel::is_evaluating;
#[cfg(feature = "limitador")]
pub(super) use with_cel::{Expression, Values};
#[cfg(not(feature = "limitador"))]
pub(super) use without_cel::{Expression, Values};

#[cfg(feature = "limitador")]
mod with_cel {
    use std::cell::Cell;
    use std::collections::HashMap;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::{Arc, LazyLock};

    use cel::objects::Map;
    use cel::{Context, ExecutionError, Program, Value};

    /// The variables that expressions can ask for.
    const VARIABLES: [&str; 2] = ["descriptors", "limit"];
    /// The longest expression in bytes, the most brackets within brackets, and the most operators. Reading and evaluating
    /// an expression takes more of the stack for each.
    const MAX_LENGTH: usize = 1000;
    const MAX_NESTING: usize = 16;
    const MAX_OPERATORS: usize = 64;
    /// The stack of the thread that reads an expression.
    const READER_STACK: usize = 32 << 20;

    /// The functions of expressions.
    static FUNCTIONS: LazyLock<Context<'static>> = LazyLock::new(Context::default);

    /// An expression.
    #[derive(Clone, Debug)]
    pub(in super::super) struct Expression {
        source: Arc<str>,
        program: Arc<Program>,
    }

    /// The values that a request's expressions ask for.
    pub(in super::super) struct Values {
        context: Context<'static>,
        descriptors: Vec<HashMap<String, String>>,
    }

    impl Values {
        /// The entries of a request's descriptors: keys and values.
        pub(in super::super) fn new<'e>(descriptors: impl IntoIterator<Item = Vec<(&'e str, &'e str)>>) -> Self {
            let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
            let map = |entries: Vec<(&str, &str)>| entries.into_iter().map(owned).collect();
            let descriptors: Vec<HashMap<String, String>> = descriptors.into_iter().map(map).collect();
            let values = descriptors.iter().map(|entries| Value::Map(Map::from(entries.clone())));
            let mut context = FUNCTIONS.new_inner_scope();
            context.add_variable_from_value("descriptors", Value::List(values.collect::<Vec<_>>().into()));
            Self { context, descriptors }
        }

        /// Sets the limit whose expressions are asked for.
        pub(in super::super) fn set_limit(&mut self, name: Option<&str>, id: Option<&str>) {
            let text = |text: Option<&str>| text.map_or(Value::Null, |text| Value::String(Arc::new(text.to_owned())));
            let limit = HashMap::from([("name", text(name)), ("id", text(id))]);
            self.context.add_variable_from_value("limit", Value::Map(Map::from(limit)));
        }
    }

    thread_local! {
        static IS_EVALUATING: Cell<bool> = const { Cell::new(false) };
    }

    /// True while this thread reads or evaluates an expression. A panic is caught then, and a client's value may be its
    /// cause, so that a program may choose not to report it.
    pub fn is_evaluating() -> bool {
        IS_EVALUATING.get()
    }

    /// Calls the library, and catches its panics.
    fn quietly<T>(call: impl FnOnce() -> T) -> std::thread::Result<T> {
        IS_EVALUATING.set(true);
        let result = catch_unwind(AssertUnwindSafe(call));
        IS_EVALUATING.set(false);
        result
    }

    /// The result of an expression for some values.
    enum Evaluated {
        Value(Value),
        /// It asks for a descriptor, an entry or a variable that isn't there.
        Missing,
        /// It has no meaning for these values.
        Meaningless,
    }

    impl Expression {
        pub(in super::super) fn parse(source: &str) -> Result<Self, String> {
            if source.len() > MAX_LENGTH {
                return Err(format!("it has more than {MAX_LENGTH} bytes"));
            }
            let (mut nesting, mut deepest, mut operators) = (0_usize, 0, 0);
            for letter in source.chars() {
                match letter {
                    '(' | '[' | '{' => nesting += 1,
                    ')' | ']' | '}' => nesting = nesting.saturating_sub(1),
                    _ => {}
                }
                deepest = deepest.max(nesting);
                if ".[+-*/%!?&|<>=,".contains(letter) {
                    operators += 1;
                }
            }
            if deepest > MAX_NESTING {
                return Err(format!("its brackets are nested more than {MAX_NESTING} deep"));
            }
            if operators > MAX_OPERATORS {
                return Err(format!("it has more than {MAX_OPERATORS} operators"));
            }
            let read = || quietly(|| Program::compile(source));
            let program = std::thread::scope(|scope| {
                let reader = std::thread::Builder::new().stack_size(READER_STACK).spawn_scoped(scope, read);
                reader.map_err(|error| error.to_string())?.join().flatten().map_err(|_| "it can't be read".to_owned())
            })?;
            let program = program.map_err(|errors| {
                let messages = errors.errors.iter().map(|error| error.msg.trim().to_owned());
                messages.collect::<Vec<_>>().join("; ")
            })?;
            let expression = Self { source: source.into(), program: Arc::new(program) };
            // Some parts of the language are read and then not evaluated by the library.
            let values = Values::new([Vec::new()]);
            match quietly(|| expression.program.execute(&values.context)) {
                Ok(_) => Ok(expression),
                Err(_) => Err("a part of it isn't supported".to_owned()),
            }
        }

        pub(in super::super) fn source(&self) -> &str {
            &self.source
        }

        /// A variable that no request has. Those that a macro declares, as in `exists(d, …)`, aren't meant.
        pub(in super::super) fn unknown_variable(&self) -> Option<String> {
            let references = self.program.references();
            let is_declared = |name: &str| self.source.contains(&format!("({name},"));
            let is_unknown = |name: &&str| !VARIABLES.contains(name) && !name.starts_with('@') && !is_declared(name);
            references.variables().into_iter().find(is_unknown).map(str::to_owned)
        }

        /// True if the condition holds. False if it asks for an entry that isn't there. True if it has no meaning for
        /// these values, so that no client's value can escape a limit.
        pub(in super::super) fn holds(&self, values: &Values) -> bool {
            match self.evaluate(values) {
                Evaluated::Value(Value::Bool(holds)) => holds,
                Evaluated::Missing => false,
                Evaluated::Value(_) | Evaluated::Meaningless => true,
            }
        }

        /// The value. `None` if it is that of an entry that isn't there. Empty if there is none for these values.
        pub(in super::super) fn value(&self, values: &Values) -> Option<String> {
            Some(match self.evaluate(values) {
                Evaluated::Value(Value::Int(number)) => number.to_string(),
                Evaluated::Value(Value::UInt(number)) => number.to_string(),
                Evaluated::Value(Value::Float(number)) => number.to_string(),
                Evaluated::Value(Value::String(text)) => text.to_string(),
                Evaluated::Value(Value::Bool(flag)) => flag.to_string(),
                Evaluated::Value(Value::Null) => "null".to_owned(),
                Evaluated::Missing => return None,
                Evaluated::Value(_) | Evaluated::Meaningless => String::new(),
            })
        }

        fn evaluate(&self, values: &Values) -> Evaluated {
            // Values that the library doesn't expect, such as an empty part of `contains`, can make it panic.
            match quietly(|| self.program.execute(&values.context)) {
                Ok(Ok(value)) => Evaluated::Value(value),
                Ok(Err(error)) if self.is_missing(&error, values) => Evaluated::Missing,
                Ok(Err(_)) | Err(_) => Evaluated::Meaningless,
            }
        }

        /// True if an error is about a descriptor, an entry or a variable that the expression names and the request
        /// doesn't have. The key or index of a client's choice isn't one of those.
        fn is_missing(&self, error: &ExecutionError, values: &Values) -> bool {
            match error {
                ExecutionError::NoSuchKey(key) => {
                    let is_named = [format!(".{key}"), format!("'{key}'"), format!("\"{key}\"")];
                    is_named.iter().any(|name| self.source.contains(name))
                        && values.descriptors.iter().any(|entries| !entries.contains_key(key.as_str()))
                }
                ExecutionError::IndexOutOfBounds(Value::Int(index)) => {
                    self.source.contains(&format!("[{index}]"))
                        && usize::try_from(*index).is_ok_and(|index| index >= values.descriptors.len())
                }
                ExecutionError::UndeclaredReference(_) => true,
                _ => false,
            }
        }
    }
}

#[cfg(not(feature = "limitador"))]
mod without_cel {
    /// An expression. This build has none.
    #[derive(Clone, Debug)]
    pub(in super::super) enum Expression {}

    /// The values that a request's expressions ask for.
    pub(in super::super) struct Values;

    impl Values {
        pub(in super::super) fn new<'e>(_: impl IntoIterator<Item = Vec<(&'e str, &'e str)>>) -> Self {
            Self
        }

        pub(in super::super) fn set_limit(&mut self, _: Option<&str>, _: Option<&str>) {}
    }

    impl Expression {
        pub(in super::super) fn parse(_: &str) -> Result<Self, String> {
            Err("this program was built without the feature `limitador`".to_owned())
        }

        pub(in super::super) fn source(&self) -> &str {
            match *self {}
        }

        pub(in super::super) fn unknown_variable(&self) -> Option<String> {
            match *self {}
        }

        pub(in super::super) fn holds(&self, _: &Values) -> bool {
            match *self {}
        }

        pub(in super::super) fn value(&self, _: &Values) -> Option<String> {
            match *self {}
        }
    }
}
