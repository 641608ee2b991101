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
    use std::collections::{HashMap, HashSet};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::{Arc, LazyLock};

    use cel::common::ast::operators::{ADD, INDEX};
    use cel::common::ast::{EntryExpr, Expr};
    use cel::common::value::CelVal;
    use cel::objects::Map;
    use cel::{Context, ExecutionError, Program, Value};

    /// The variables that expressions can ask for.
    const VARIABLES: [&str; 2] = ["descriptors", "limit"];
    /// The longest expression in bytes, the most brackets within brackets, and the most operators. Reading and evaluating
    /// an expression takes more of the stack for each.
    const MAX_LENGTH: usize = 1000;
    const MAX_NESTING: usize = 16;
    const MAX_OPERATORS: usize = 64;
    /// The most macros (`all`, `exists`, `exists_one`, `map`, `filter`), and the most signs `+`. Each multiplies the time and
    /// the memory of the others.
    const MAX_MACROS: usize = 2;
    const MAX_ADDITIONS: usize = 8;
    /// The most descriptors of a request, and the most bytes of their entries.
    const MAX_DESCRIPTORS: usize = 64;
    const MAX_DESCRIPTOR_BYTES: usize = 32 << 10;
    /// The stack of the thread that reads an expression.
    const READER_STACK: usize = 32 << 20;

    /// The functions of expressions.
    static FUNCTIONS: LazyLock<Context<'static>> = LazyLock::new(Context::default);

    /// An expression.
    #[derive(Clone, Debug)]
    pub(in super::super) struct Expression {
        source: Arc<str>,
        program: Arc<Program>,
        parts: Arc<Parts>,
    }

    /// The parts of an expression that tell what it asks for, and what it costs.
    #[derive(Debug, Default)]
    struct Parts {
        /// The names of entries, and the indices of descriptors.
        entries: HashSet<String>,
        indices: HashSet<i64>,
        macros: usize,
        additions: usize,
    }

    impl Parts {
        fn of(expression: &Expr) -> Self {
            let mut parts = Self::default();
            parts.add(expression);
            parts
        }

        fn add(&mut self, expression: &Expr) {
            match expression {
                Expr::Call(call) => {
                    if call.func_name == ADD {
                        self.additions += 1;
                    }
                    if call.func_name == INDEX
                        && let [of, at] = &call.args[..]
                    {
                        match &at.expr {
                            Expr::Literal(CelVal::String(name)) if is_descriptor(&of.expr) => {
                                self.entries.insert(name.clone());
                            }
                            Expr::Literal(CelVal::Int(index)) if is_descriptors(&of.expr) => {
                                self.indices.insert(*index);
                            }
                            _ => {}
                        }
                    }
                    call.target.iter().map(|target| &**target).chain(&call.args).for_each(|part| self.add(&part.expr));
                }
                Expr::Select(select) => {
                    if is_descriptor(&select.operand.expr) {
                        self.entries.insert(select.field.clone());
                    }
                    self.add(&select.operand.expr);
                }
                Expr::Comprehension(found) => {
                    self.macros += 1;
                    let parts =
                        [&found.iter_range, &found.accu_init, &found.loop_cond, &found.loop_step, &found.result];
                    parts.iter().for_each(|part| self.add(&part.expr));
                }
                Expr::List(list) => list.elements.iter().for_each(|element| self.add(&element.expr)),
                Expr::Map(map) => map.entries.iter().for_each(|entry| self.add_entry(&entry.expr)),
                Expr::Struct(found) => found.entries.iter().for_each(|entry| self.add_entry(&entry.expr)),
                Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => {}
            }
        }

        fn add_entry(&mut self, entry: &EntryExpr) {
            match entry {
                EntryExpr::StructField(field) => self.add(&field.value.expr),
                EntryExpr::MapEntry(entry) => {
                    self.add(&entry.key.expr);
                    self.add(&entry.value.expr);
                }
            }
        }
    }

    fn is_descriptors(expression: &Expr) -> bool {
        matches!(expression, Expr::Ident(name) if name == "descriptors")
    }

    /// True for one of the descriptors, and for the variable of a macro, which may be one.
    fn is_descriptor(expression: &Expr) -> bool {
        match expression {
            Expr::Call(call) => call.func_name == INDEX && call.args.first().is_some_and(|of| is_descriptors(&of.expr)),
            Expr::Ident(name) => !VARIABLES.contains(&name.as_str()),
            _ => false,
        }
    }

    /// The values that a request's expressions ask for.
    pub(in super::super) struct Values {
        context: Context<'static>,
        descriptors: Vec<HashMap<String, String>>,
        /// True if they are too many, or too long, to be evaluated.
        are_too_large: bool,
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
            let bytes: usize = descriptors.iter().flatten().map(|(key, value)| key.len() + value.len()).sum();
            let are_too_large = descriptors.len() > MAX_DESCRIPTORS || bytes > MAX_DESCRIPTOR_BYTES;
            Self { context, descriptors, are_too_large }
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

    /// A function that expressions can't call, which evaluation would take for a missing variable.
    fn unknown_function(program: &Program) -> Option<String> {
        let references = program.references();
        let is_name = |name: &&str| name.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_');
        let is_operator = |name: &&str| {
            name.starts_with("_") && name.contains(|letter: char| !letter.is_alphanumeric() && letter != '_')
        };
        let is_unknown = |name: &&str| {
            let call = Program::compile(&format!("{name}()"));
            let called = call.map(|call| quietly(|| call.execute(&FUNCTIONS)));
            matches!(called, Ok(Ok(Err(ExecutionError::UndeclaredReference(found)))) if *found == *name)
        };
        let mut names = references.functions();
        names.sort_unstable();
        names.into_iter().filter(is_name).filter(|name| !is_operator(name)).find(is_unknown).map(str::to_owned)
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
            let parts = Parts::of(&program.expression().expr);
            if parts.macros > MAX_MACROS {
                let names = "`all`, `exists`, `exists_one`, `map` and `filter`";
                return Err(format!("it has more than {MAX_MACROS} of {names}"));
            }
            if parts.additions > MAX_ADDITIONS {
                return Err(format!("it has more than {MAX_ADDITIONS} signs `+`"));
            }
            if let Some(name) = unknown_function(&program) {
                return Err(format!("there is no function `{name}`"));
            }
            let expression = Self { source: source.into(), program: Arc::new(program), parts: Arc::new(parts) };
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
            if values.are_too_large {
                return Evaluated::Meaningless;
            }
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
                    self.parts.entries.contains(key.as_str())
                        && values.descriptors.iter().any(|entries| !entries.contains_key(key.as_str()))
                }
                ExecutionError::IndexOutOfBounds(Value::Int(index)) => {
                    self.parts.indices.contains(index)
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
