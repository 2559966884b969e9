/* The rows of the tables that compiled.py makes, where it says what they hold: every member takes 8 bytes. And room to work in. */

typedef struct {
    const real *costs;
    const real *inbox;
    const int64_t *gather;
    double weight;
    int64_t labels, star, links, earlier, later;
} NAME(Node);

typedef struct {
    const real *seconds;
    real *inbox;
    double part;
    int64_t here, there, by_row, star, branch;
} NAME(Link);

typedef struct {
    real *charges, *over, *direct, *sent;
    const int64_t *columns, *at, *to;
    int64_t count, straight, late;
} NAME(Branch);

typedef struct {
    const real *seconds, *price, *parts;
    real *made;
    const NAME(Branch) *branch;
    int64_t sources, aliases, layouts, branches;
    double step, rare, least, faint;
} NAME(Star);

typedef struct {
    const NAME(Node) *nodes;
    const NAME(Link) *links;
    const NAME(Star) *stars;
    int64_t count;
} NAME(Tables);

typedef struct {
    real *belief, *rest, *part; /* by label, or by pair of a star */
    real *sent;                 /* by layout */
    real *lines;                /* three of them, each `longest` */
    real *needs, *pays, *odds;  /* by branch and layout of a star */
    real *boxed;                /* by branch and alias */
    int64_t longest;
} NAME(Scratch);
